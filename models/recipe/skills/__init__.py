"""One file per skill; each makes conversations from a `World` and knows nothing of the others."""
