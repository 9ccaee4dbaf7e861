"""The bundled models: weights as package data, each with the recipe that made them."""
