"""The shared decoder model: a Llama-family transformer on real or seeded weights, that techniques rebuild in part.

config     dimensions, from Hugging Face, GGUF or by name
decoder    the model itself, and how its parts are replaced
cache      the contiguous key-value cache
fuse       one matrix product for the projections that share an input
weights    load_model: safetensors, GGUF or seeded weights
tokenizer  text to ids and back
perplexity how well a model predicts a text
text       real text, split for calibration and judging
fetch      real weights
"""
