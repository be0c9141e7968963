"""A trained model as files for other programs and for ``load_model``."""

# load_model reads the first one; parquet and vectors are for data frames and search indices, and
# torch is a program of torch.export.
FORMATS = ("safetensors", "parquet", "vectors", "torch")
