"""Extend a trained run by new triples, entities and relations."""
