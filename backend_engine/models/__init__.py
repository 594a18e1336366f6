"""Model loading (folder, hub id, GGUF) and the attention hook that puts our paged KV cache under it."""
