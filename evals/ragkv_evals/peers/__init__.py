"""Other systems that ragkv is measured against, each in an environment of its own."""
