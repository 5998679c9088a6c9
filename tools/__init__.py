"""What the checks of this repository need and the package does not."""
