"""The fixtures of tests of the trainer."""

from support.trainer_fixtures import ledger, model, no_lease_outlives_its_test, one_thread

__all__ = ["ledger", "model", "no_lease_outlives_its_test", "one_thread"]
