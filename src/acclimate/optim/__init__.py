"""How the weights move: optimisers that PyTorch, transformers' Trainer and Accelerate take like any other."""
