"""What DPO and reward-model training share."""
