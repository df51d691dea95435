"""The nouns of Lamina. Imports no other room."""
