"""What a long context is worth to a trained model: loss by position, passkey retrieval.

``checkpoint_model`` loads a checkpoint whole, ``position_loss`` and ``retrieval`` measure,
``passkey_mix`` makes the synthetic documents, ``report`` writes tables and JSON. The commands
are ``tools/evaluate.py`` and ``tools/make_passkey_data.py``.
"""
