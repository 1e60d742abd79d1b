"""Whether engines may sleep while trainers compute."""

from turnwise.settings import Settings


class SleepSettings(Settings):
    """Engines that share their GPUs with trainers."""

    engine_sleep: bool = False
    """Bring engines to sleep while a trainer with `engine_sleep_level` computes. They need `--enable-sleep-mode`."""
