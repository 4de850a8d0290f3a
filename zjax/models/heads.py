"""Output head: logits and loss from the last hidden states."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from zjax.models import layers
from zjax.ops import activation, invariant
from zjax.ops.cross_entropy import StoredTeacher, Teacher, TokenLoss, token_loss
from zjax.ops.divergence import FORWARD
from zjax.ops.target_logprobs import TargetLogprobs, target_logprobs
from zjax.ops.token_chunks import logits_of
from zjax.parallel import sequence, tensor
from zjax.settings import schema
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import open_size


class Head(nnx.Module):
    """Last normalisation, and the output matrix unless the head is tied.

    Args:
        masked: Whether states pass through a dense layer first, and logits have a bias,
            as in BERT.
    """

    def __init__(self, config: schema.Model, *, masked: bool = False, rngs: nnx.Rngs):
        embed: layers.Dims = (("embed", config.embed_size),)
        vocab: layers.Dims = (("vocab", config.vocab_size),)
        normal = layers.make_normal(rngs.params(), layers.INIT_STD)
        self.config = config
        self.invariant = False
        """Whether sums have one order, see `zjax.ops.invariant`."""
        self.divergence = FORWARD
        """Divergence from a teacher, see `zjax.ops.divergence`."""
        self.transform = (
            layers.Linear(embed, embed, use_bias=config.use_bias, rngs=rngs)
            if masked
            else None
        )
        self.norm = layers.Norm(config)
        self.kernel = (
            None if config.tied_head else layers.make_param(vocab + embed, normal)
        )
        self.bias = (
            layers.make_param(vocab, jnp.zeros) if masked and config.use_bias else None
        )
        # Zeros: a critic estimates nothing before it has learned.
        self.value = layers.make_param(embed, jnp.zeros) if config.value_head else None

    def logits(
        self, x: Float[Array, "B L M"], table: Float[Array, "V M"] | None
    ) -> Float[Array, "B L V"]:
        """Returns logits in float32; `table` is the token table of tied models."""
        logits = logits_of(*self.factors(x, table), invariant=self.invariant)
        if self.bias is None:
            cap = invariant.soft_cap if self.invariant else activation.soft_cap
            return cap(logits, self.config.logit_soft_cap)
        return logits + self.bias[...].astype(jnp.float32)[None, None, :]

    def loss(
        self,
        x: Float[Array, "B L M"],
        table: Float[Array, "V M"] | None,
        batch: dict[str, Any],
    ) -> TokenLoss:
        """Sums the loss of batch["targets"], and of batch["teacher"] if there is one.

        `table` is the token table of tied models.
        """
        teacher = batch.get("teacher")
        if teacher is not None:
            kind = StoredTeacher if "ids" in teacher else Teacher
            teacher = kind(**{name: teacher[name] for name in kind._fields})
            # The student's states are in the order in which devices split sequences.
            teacher = teacher.with_tokens(lambda x: sequence.arrange(x, self.config))
        return token_loss(
            *self.factors(x, table),
            sequence.arrange(batch["targets"], self.config),
            sequence.arrange(token_weights(batch), self.config),
            bias=None if self.bias is None else self.bias[...],
            teacher=teacher,
            divergence=self.divergence,
            cap=self.config.logit_soft_cap,
            z_loss=self.config.z_loss,
            invariant=self.invariant,
            **self._chunks(x),
        )

    def target_logprobs(
        self,
        x: Float[Array, "B L M"],
        table: Float[Array, "V M"] | None,
        targets: Int[Array, "B L"],
        temperature: float,
    ) -> TargetLogprobs:
        """Computes log-probabilities of targets, -100 for none, and entropies.

        `table` is the token table of tied models; logits are divided by `temperature`.
        """
        found = target_logprobs(
            *self.factors(x, table),
            sequence.arrange(targets, self.config),
            temperature=temperature,
            cap=self.config.logit_soft_cap,
            invariant=self.invariant,
            **self._chunks(x),
        )
        return jax.tree.map(lambda x: sequence.restore(x, self.config), found)

    def factors(
        self, x: Float[Array, "B L M"], table: Float[Array, "V M"] | None
    ) -> tuple[Float[Array, "B L M"], Float[Array, "V M"]]:
        """Returns the two factors of the logits, which have neither bias nor cap."""
        return self._features(x), self._matrix(table)

    def values(self, x: Float[Array, "B L M"]) -> Float[Array, "B L"]:
        """Computes the value of each token, in float32."""
        assert self.value is not None
        values = jnp.einsum(
            "blm,m->bl",
            self._features(x),
            self.value[...],
            preferred_element_type=jnp.float32,
        )
        return sequence.restore(values, self.config)

    def _chunks(self, x):
        """Returns how the tokens of the states lie on devices and in chunks."""
        return {
            "chunk_tokens": self.config.loss_chunk_tokens,
            "num_batch_shards": layers.num_batch_shards(x.shape[0]),
            "num_length_shards": math.gcd(x.shape[1], open_size(meshes.SEQUENCE)),
        }

    def _features(self, x):
        """Transforms and normalises states, gathered over the tensor axis."""
        if self.transform is not None:
            given = self.config.activation
            # A gated activation has no form for one matrix: the transform takes GELU.
            activate = activation.UNGATED.get(given, activation.gelu)
            x = activate(self.transform(x))
        # The tensor axis splits the vocabulary next, so each device needs all tokens.
        return tensor.join_stream(self.norm(x))

    def _matrix(self, table):
        """Returns the output matrix: a separate kernel, or the token table."""
        if self.kernel is not None:
            return self.kernel[...]
        assert table is not None
        return table


def token_weights(batch: dict[str, Any]) -> Float[Array, "B L"]:
    """Returns the weight of each token, float32: as given, or 1 for all but padding.

    Example:
        >>> batch = {"targets": jnp.ones((1, 3), int), "lengths": jnp.array([2])}
        >>> token_weights(batch).tolist()
        [[1.0, 1.0, 0.0]]
    """
    if "weights" in batch:
        return batch["weights"].astype(jnp.float32)
    weights = jnp.ones(batch["targets"].shape, jnp.float32)
    if "segment_ids" in batch:
        weights *= batch["segment_ids"] > 0
    if "lengths" in batch:
        columns = jnp.arange(weights.shape[1])[None, :]
        weights *= columns < batch["lengths"][:, None]
    return weights
