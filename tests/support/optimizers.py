"""Every optimizer that optax publishes, and whether one mean gradient drives it.

A table of names and makers. A name new in the installed optax makes a test fail until
it is put here or among those that are refused.
"""

import warnings

import jax
import optax
from optax import contrib

LR = 1e-2


def _optimistic_adam():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return optax.optimistic_adam(LR)


OPTIMIZERS = {
    "adabelief": lambda: optax.adabelief(LR),
    "adadelta": lambda: optax.adadelta(1.0),
    "adafactor": lambda: optax.adafactor(LR, min_dim_size_to_factor=8),
    "adagrad": lambda: optax.adagrad(LR),
    "adam": lambda: optax.adam(LR),
    "adamax": lambda: optax.adamax(LR),
    "adamaxw": lambda: optax.adamaxw(LR),
    "adamw": lambda: optax.adamw(LR),
    "adan": lambda: optax.adan(LR),
    "amsgrad": lambda: optax.amsgrad(LR),
    "fromage": lambda: optax.fromage(LR),
    "lamb": lambda: optax.lamb(LR),
    "lars": lambda: optax.lars(LR),
    "lbfgs": lambda: optax.lbfgs(memory_size=3),
    "lion": lambda: optax.lion(LR),
    "nadam": lambda: optax.nadam(LR),
    "nadamw": lambda: optax.nadamw(LR),
    "noisy_sgd": lambda: optax.noisy_sgd(LR, key=jax.random.key(0)),
    "novograd": lambda: optax.novograd(LR),
    "optimistic_adam": _optimistic_adam,
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(LR),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(LR),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "radam": lambda: optax.radam(LR),
    "rmsprop": lambda: optax.rmsprop(LR, momentum=0.9),
    "rprop": lambda: optax.rprop(LR),
    "sgd": lambda: optax.sgd(LR, momentum=0.9),
    "sign_sgd": lambda: optax.sign_sgd(LR),
    "signum": lambda: optax.signum(LR),
    "sm3": lambda: optax.sm3(LR),
    "yogi": lambda: optax.yogi(LR),
    "contrib.acprop": lambda: contrib.acprop(LR),
    "contrib.ademamix": lambda: contrib.ademamix(LR),
    "contrib.adopt": lambda: contrib.adopt(LR),
    "contrib.cocob": lambda: contrib.cocob(),
    "contrib.dadapt_adamw": lambda: contrib.dadapt_adamw(),
    "contrib.dog": lambda: contrib.dog(),
    "contrib.dowg": lambda: contrib.dowg(),
    "contrib.galore": lambda: contrib.galore(LR, rank=2),
    "contrib.madgrad": lambda: contrib.madgrad(LR),
    "contrib.mechanize": lambda: contrib.mechanize(optax.adamw(LR), s_init=LR),
    "contrib.momo": lambda: contrib.momo(),
    "contrib.momo_adam": lambda: contrib.momo_adam(LR),
    "contrib.muon": lambda: contrib.muon(LR),
    "contrib.normalize": lambda: optax.chain(contrib.normalize(), optax.sgd(LR)),
    "contrib.prodigy": lambda: contrib.prodigy(),
    "contrib.reduce_on_plateau": lambda: optax.chain(
        optax.adam(LR), contrib.reduce_on_plateau()
    ),
    # Wrapped, as its update refuses any extra argument other than `grad_fn`.
    "contrib.sam": lambda: optax.GradientTransformation(
        *contrib.sam(optax.sgd(LR), optax.chain(contrib.normalize(), optax.sgd(LR)))
    ),
    "contrib.schedule_free": lambda: contrib.schedule_free(optax.sgd(LR), LR),
    "contrib.schedule_free_adamw": lambda: contrib.schedule_free_adamw(LR),
    "contrib.schedule_free_sgd": lambda: contrib.schedule_free_sgd(LR),
    "contrib.simplified_ademamix": lambda: contrib.simplified_ademamix(LR),
    "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(
        optax.adam(LR)
    ),
}
"""By the name in optax; each makes an optimizer for a tree of float arrays."""
ELEMENTWISE = {
    "adabelief",
    "adadelta",
    "adagrad",
    "adamax",
    "adamaxw",
    "adan",
    "amsgrad",
    "lion",
    "nadam",
    "nadamw",
    "optimistic_adam",
    "optimistic_adam_v2",
    "optimistic_gradient_descent",
    "radam",
    "rmsprop",
    "rprop",
    "sign_sgd",
    "signum",
    "yogi",
    "contrib.acprop",
    "contrib.ademamix",
    "contrib.adopt",
    "contrib.cocob",
    "contrib.madgrad",
    "contrib.simplified_ademamix",
    "contrib.schedule_free_adamw",
    "contrib.schedule_free_sgd",
}
"""Those whose update of a number reads no other; Adam's and SGD's are not listed."""

REFUSED = {
    "lookahead": (
        lambda: optax.lookahead(optax.sgd(LR), sync_period=2, slow_step_size=0.5),
        "its parameters are a pair, fast and slow",
    ),
    "contrib.dpsgd": (
        lambda: contrib.dpsgd(LR, l2_norm_clip=1.0, noise_multiplier=1.0, seed=0),
        "it clips the gradient of each example, and the step has only their mean",
    ),
    "contrib.differentially_private_aggregate": (
        lambda: contrib.differentially_private_aggregate(1.0, 1.0, jax.random.key(0)),
        "it clips the gradient of each example, and the step has only their mean",
    ),
    "contrib.hutchinson_estimator_diag_hessian": (
        lambda: contrib.hutchinson_estimator_diag_hessian(jax.random.key(0)),
        "it differentiates the loss twice, as `obj_fn`",
    ),
    "contrib.sophia": (
        lambda: contrib.sophia(LR),
        "it differentiates the loss twice, as `obj_fn`",
    ),
    "contrib.sam(opaque_mode)": (
        lambda: contrib.sam(optax.sgd(LR), optax.sgd(LR), opaque_mode=True),
        "it takes several gradients per step, from `grad_fn`",
    ),
}
"""By name: the maker, and why one update from the mean gradient cannot work."""

NOT_OPTIMIZERS = {"contrib.schedule_free_eval_params"}
"""Public functions of optax.contrib that make no transformation."""
