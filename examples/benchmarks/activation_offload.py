"""Llama 8B shape at 32k tokens: activations on the host against full recomputation.

One sequence per device, ZeRO-3. On the host rest what enters every block and what
attention returns, which is then not computed again.
"""

from contestants import zjax
from contests import Case, Contest, Row

SETTINGS = (
    "zero.stage=3",
    "model.max_length=32768",
    "data.length=32768",
    "microbatch_size=1",
    "global_batch_size=0",
)
RECOMPUTED, OFFLOADED = "zjax recomputed", "zjax with activations on the host"


def get_contest():
    config = "configs/llama_8b.py"
    contestants = (
        zjax(RECOMPUTED, config, *SETTINGS, "model.remat=full"),
        zjax(
            OFFLOADED,
            config,
            *SETTINGS,
            "model.remat=attention",
            "model.activation_memory=pinned_host",
        ),
    )

    def case(metric, unit, name, must, aim=None):
        sides = ((OFFLOADED,), (RECOMPUTED,))
        return Case(*sides, metric, unit, must=must, aim=aim, name=name)

    row = Row(
        "activation_offload",
        "Activations on the host cost no more than recomputation.",
        (
            case("step_seconds", "seconds", "step", 1.0, 0.9),
            case("peak_bytes", "bytes", "memory", 1.0),
        ),
        theme="offload",
        higher_is_better=False,
    )
    return Contest("Llama 8B shape, 32k tokens", contestants, (row,))
