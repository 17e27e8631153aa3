"""The model families: plain nn.Modules whose parameters bear the names of the checkpoints."""
