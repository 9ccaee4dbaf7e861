"""The bundled models: weights as package data."""
