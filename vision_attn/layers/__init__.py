"""Parts that models share: embeddings, MLP, encoder layers, pooling."""
