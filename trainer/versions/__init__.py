"""States of a run and the policy versions that are made of them: on disk, published, acknowledged."""
