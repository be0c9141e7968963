"""Write a trained model for other programs, and read exports."""
