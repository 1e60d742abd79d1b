"""A new version on trial, and an older one that some sessions keep, so that its successors' gain is measured."""
