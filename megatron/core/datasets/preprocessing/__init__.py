"""From raw corpora to token files: reading, tokenizing in parallel, merging, looking inside."""
