"""Operations on single values, some with the histogram of the channel: inversion, thresholds, stretched ranges."""

from __future__ import annotations

from image.examples import Example, Examples, of_functional, of_method, sample

EXAMPLES: dict[str, Examples] = {
    "autocontrast": of_functional("autocontrast"),
    "equalize": of_functional("equalize"),
    "posterize": of_functional("posterize", lambda a: (a.chance.randint(1, 7),)),
    "solarize": lambda a: [
        Example("solarize", (a.chance.uniform(0.1, 0.9) * 255 * a.scale,)),
        Example("solarize", (0.5,), label="a threshold below 1"),
    ],
    "invert": of_functional("invert"),
    "adjust_gamma": of_functional("adjust_gamma", lambda a: (a.chance.uniform(0.3, 2.5), a.chance.uniform(0.5, 1.5))),
    "point": lambda a: of_method(
        a, "point", {"a table": ([a.chance.randrange(256) for _ in range(256 * a.channels)],)}
    ),
}
TRANSFORMS = {
    "RandomAutocontrast": [sample(p=1.0)],
    "RandomEqualize": [sample(p=1.0)],
    "RandomPosterize": [sample(2, p=1.0)],
    "RandomSolarize": [sample(128, p=1.0), sample(0.5, p=1.0, label="a threshold below 1")],
    "RandomInvert": [sample(p=1.0)],
}
