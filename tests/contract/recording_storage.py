"""A storage backend that SGLang loads by name (`dynamic`): files, and what each write was told.

Owns the record only. Must never be imported by anything but SGLang's loader and a test.
"""

from sglang.srt.mem_cache.hicache_storage import HiCacheFile

SEEN = []
"""(key of a page, `extra_info` of the write that brought it)."""


class RecordingStorage(HiCacheFile):
    def __init__(self, storage_config, extra_config):
        super().__init__(storage_config)

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        SEEN.extend((key, extra_info.extra_info) for key in keys)
        pool = self.mem_pool_host
        places = host_indices[:: pool.page_size].tolist()
        pages = [pool.get_data_page(place, flat=True) for place in places]
        return [self.set(key, page) for key, page in zip(keys, pages, strict=True)]

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        pool, found = self.mem_pool_host, []
        for key, place in zip(keys, host_indices[:: pool.page_size].tolist(), strict=True):
            page = self.get(key, pool.get_dummy_flat_data_page())
            found.append(page is not None)
            if page is not None:
                pool.set_from_flat_data_page(place, page)
        return found
