"""The recipe of the demonstration model: corpus, tokenizer, training, evaluation, export."""
