"""Formats of other tools for `turnwise export` and `turnwise import`, found by entry points; one module a format.

A module of an export has `lines(session)`, which yields the JSON lines of a session. One of an import has
`key_of(document)`, the session that a document belongs to, and `drafts_of(document)`, the sessions that it becomes:
each with `conversations`, of which each has `messages` and may have `trained` (the replies that become turns), `tools`,
`model`, `sampled` and `created_at`; and with `rewards` and `task_id`. Turnwise checks messages and tools itself.
"""
