"""Other formats of models and the way to them and back."""
