"""Models, tokenizers and chat templates as other programs write them."""
