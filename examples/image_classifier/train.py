"""A convolutional network with BatchNorm reads digits in a typeface it never saw."""

import argparse
import pathlib

import flax.linen as nn
import jax
import matplotlib
import numpy as np
import optax
from PIL import Image, ImageDraw, ImageFont

import zjax

SIDE = 24
FONTS = pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf"
TRAIN_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSansMono",
    "DejaVuSansMono-Oblique",
    "DejaVuSerif",
    "DejaVuSerif-Italic",
)
TEST_FONT = "STIXGeneralBol"


class Network(nn.Module):
    """Three convolutions; the statistics of BatchNorm travel in the train state."""

    @nn.compact
    def __call__(self, x, train):
        for width in (16, 32, 64):
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


def loss_fn(model, batch, key):
    logits = model(batch["image"], train=model.train)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["digit"])
    accuracy = (logits.argmax(-1) == batch["digit"]).mean()
    return loss.mean(), loss.size, {"accuracy": accuracy}


def draw(digit, font, size, angle):
    """One digit in the middle of a square picture, as numbers from 0 to 1."""
    picture = Image.new("L", (SIDE, SIDE))
    letter = ImageFont.truetype(FONTS / f"{font}.ttf", size)
    middle = (SIDE / 2, SIDE / 2)
    ImageDraw.Draw(picture).text(middle, str(digit), 255, letter, anchor="mm")
    turned = picture.rotate(angle, Image.Resampling.BILINEAR)
    return np.asarray(turned, np.float32) / 255


def draw_digits(fonts):
    """Every digit in every look: pictures [N, SIDE, SIDE] and digits [N]."""
    looks = [(f, s, a) for f in fonts for s in (14, 17, 20) for a in (-12, 0, 12)]
    pictures = [draw(digit, *look) for look in looks for digit in range(10)]
    return np.stack(pictures), np.tile(np.arange(10, dtype=np.int32), len(looks))


def make_batch(digits, seed, size=256):
    """Pictures drawn at random, moved by a few pixels, under heavy noise."""
    pictures, labels = digits
    rng = np.random.default_rng(seed)
    chosen = rng.integers(len(labels), size=size)
    shifts = rng.integers(-3, 4, size=(size, 2))
    image = np.stack(
        [
            np.roll(picture, shift, (0, 1))
            for picture, shift in zip(pictures[chosen], shifts, strict=True)
        ]
    )
    image += rng.normal(scale=0.3, size=image.shape)
    return {"image": image[..., None].astype(np.float32), "digit": labels[chosen]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    num_steps = parser.parse_args().steps

    jax.config.update("jax_num_cpu_devices", 8)  # no effect on a machine with GPUs
    train_digits, test_digits = draw_digits(TRAIN_FONTS), draw_digits([TEST_FONT])
    config = {
        "zero": {"stage": 2, "min_shard_elements": 1024},
        "precision": {
            "compute_dtype": "float32"
        },  # convolutions in bfloat16 crawl on a CPU
    }
    run = zjax.initialize(
        Network(), optax.adamw(3e-3), loss_fn, make_batch(train_digits, 0), config
    )
    print(zjax.describe_plan(run.plan))

    state = run.state
    for step in range(num_steps):
        state, metrics = run.step(state, make_batch(train_digits, step))
        if step % 50 == 0:
            print(f"step {step}: accuracy in training {metrics['accuracy']:.3f}")
    metrics = run.evaluate(state, make_batch(test_digits, seed=10**6, size=2048))
    print(f"accuracy in an unseen typeface: {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
