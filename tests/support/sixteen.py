"""28 heads on 16 devices, which only a process of its own can have.

`python -m tests.support.sixteen` prints the losses of the mesh and of one device.
"""

import dataclasses
import json

import jax

from tests.support import tensor
from zjax.settings import schema

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 16)
    model = dataclasses.replace(
        tensor.GPT, num_layers=1, num_heads=28, num_kv_heads=28, embed_size=56
    )
    found = []
    for mesh, num_devices in ((schema.Mesh(tensor=16), 16), (schema.Mesh(), 1)):
        losses, _ = tensor.train(tensor.make_config(model, mesh), num_devices)
        found.append(losses.tolist())
    print(json.dumps(found))
