"""What a generator has allocated on a device."""

import jax


def bytes_here(tree):
    """Bytes on the first device, in its own memory; shared buffers count once."""
    device = jax.devices()[0]
    shards = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for array in jax.tree.leaves(tree)
        if array.sharding.memory_kind == device.default_memory().kind
        for shard in array.addressable_shards
        if shard.device == device
    }
    return sum(shards.values())


def weights_and_caches(generator):
    """Bytes of the weights and of the pages of a generator."""
    passes = generator._worker._runner.engine._passes
    return bytes_here(passes._weights), bytes_here(passes._caches)
