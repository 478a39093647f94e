"""Loading and saving, LoRA, attention for packed batches, log-probs without whole logits."""
