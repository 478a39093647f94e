"""Loading and saving, LoRA, attention for packed batches, log-probs without materialising all logits."""
