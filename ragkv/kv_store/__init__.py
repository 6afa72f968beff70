"""K/V that outlives its question: prompts that begin alike are read once."""

from ragkv.kv_store.keys import DiskDType
from ragkv.kv_store.store import DISK_BYTES, MEMORY_BYTES, KVStore, StoreInfo
from ragkv.kv_store.usage import Usage

__all__ = ["DISK_BYTES", "MEMORY_BYTES", "DiskDType", "KVStore", "StoreInfo", "Usage"]
