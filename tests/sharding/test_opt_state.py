"""An optimizer that fails says why, and one that works is not refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zjax.errors import PlanError
from zjax.sharding.param_plans import abstract_opt_state

PARAMS = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)}


def refuse(updates, state, params=None):
    raise RuntimeError("no update today")


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        pytest.param(
            optax.masked(optax.sgd(0.1), lambda params: params["v"]),
            "optimizer='masked(chain(identity, scale))' fails on the parameters "
            "(KeyError: 'v'); correct what it raises",
            id="mask-that-raises",
        ),
        pytest.param(
            optax.GradientTransformation(optax.identity().init, refuse),
            "optimizer='refuse' fails in an update from one mean gradient "
            "(RuntimeError: no update today); use a transformation that needs only "
            "gradient, params, value, grad and value_fn",
            id="update-that-raises",
        ),
    ],
)
def test_what_an_optimizer_raises_is_told(tx, message):
    with pytest.raises(PlanError) as error:
        abstract_opt_state(tx, PARAMS)
    assert str(error.value) == message


def test_labels_of_another_form_are_told_with_the_form_of_parameters():
    tx = optax.masked(optax.sgd(0.1), [True])
    with pytest.raises(PlanError) as error:
        abstract_opt_state(tx, PARAMS)
    text = str(error.value)
    assert text.startswith("optimizer='masked(chain(identity, scale))' fails on the")
    assert "<class 'list'>" in text
    assert text.endswith(
        "; zjax holds parameters as nested dicts of arrays: give masks and labels that "
        "form, as nnx.to_pure_dict(mask) has"
    )


def test_numbers_of_64_bits_may_widen_updates_but_not_the_state():
    rate = np.float64(0.1)
    with jax.enable_x64(True):
        abstract_opt_state(optax.sgd(rate), PARAMS)
        with pytest.raises(PlanError) as error:
            abstract_opt_state(optax.scale_by_adam(b1=np.float64(0.9)), PARAMS)
    assert str(error.value) == (
        "optimizer='scale_by_adam' changes mu/w from float32(2, 3) to float64(2, 3) in "
        "an update; use a transformation that keeps shapes and dtypes, and give it "
        "Python numbers, not arrays or NumPy's float64"
    )
