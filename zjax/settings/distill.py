"""Settings of what a student learns from a teacher."""

from typing import Annotated

from zjax.settings import ranges
from zjax.settings.choices import Choice, section


@section
class ForwardKl(Choice):
    """KL(teacher || student): the student covers all modes of the teacher.

    Reference: Hinton et al., arXiv:1503.02531.
    """


@section
class ReverseKl(Choice):
    """KL(student || teacher): the student seeks modes of the teacher.

    Reference: Gu et al., MiniLLM (arXiv:2306.08543).
    """


@section
class JensenShannon(Choice):
    """Divergences of teacher and student from a mixture (GKD, arXiv:2306.13649)."""

    beta: Annotated[
        float, ranges.Range(lambda x: 0 < x < 1, "use more than 0 and less than 1")
    ] = 0.5
    """Share of the teacher in the mixture."""


@section
class LayerDistance:
    """How much, and for how long, the distance of a student's layers counts."""

    weight: ranges.Positive = 1.0
    """Weight of the mean distance of all layers beside the cross-entropy."""
    fraction: ranges.Fraction = 0.6
    """Fraction of `num_steps` after which the distance no longer counts."""

    def num_steps(self, total: int) -> int:
        """Steps with the distance, out of all steps of a run."""
        return round(self.fraction * total)


@section
class HiddenStates(LayerDistance):
    """Distance of the residual stream of each layer from the stream of the teacher.

    The distance of a token is the squared error over the squared norm of the teacher's
    stream. A layer of a pruned start learns from the original of the layer, other
    layers from evenly spaced layers.
    """


UNCOMPARED = "window", "attention_sinks", "latent"
"""Settings of models whose attention `AttentionMaps` does not compare, besides sparse
attention."""


@section
class AttentionMaps(LayerDistance):
    """KL(teacher || student) of the attention of each layer (MiniLM, arXiv:2002.10957).

    Averaged over tokens and heads; head i follows head i, or the head that it is a copy
    of after a pruned start. Layers follow the layers that `HiddenStates` names.
    """
