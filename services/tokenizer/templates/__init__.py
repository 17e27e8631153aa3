"""The checkpoint's chat template, and where in what it renders each part stands."""
