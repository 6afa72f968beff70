"""ragkv: cited answers over long retrieved contexts on a compressed KV cache."""
