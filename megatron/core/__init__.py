"""Building blocks of long-context pretraining."""
