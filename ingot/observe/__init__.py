"""What a person sees of a run: its figures, curves and report."""
