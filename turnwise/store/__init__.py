"""The database: the only state that proxy and trainer share.

All code here is synchronous SQLAlchemy Core, the same for SQLite and PostgreSQL; the proxy calls it from threads. Most
functions take an open transaction, and who opened it commits all changes together. The modules:

 tables, rows, digests                 what is stored, and how records become rows and back
 database, postgres_deadline           connections and transactions
 statements, pages                     SQL of the hot path, SQL that differs by database, pages by their bytes
 new_turns, ledger, idempotency        writes of running agents: turns, sessions, rewards; each once
 session_changes, forks, feedback      later changes of sessions, copies of them, and what people say about them
 groups, claims                        what is ready to be trained, and what a trainer holds and acknowledges
 experiences, expected_advantages      what is trained, computed from turns and rewards
 trained, evaluations                  updates and what each trained; held-out sessions by version
 policies, policy_summaries            policies by tenant and name, and what each holds
 versions, serving, arms, played       versions of policies, which are served, and what their sessions did
 session_filter, queries, lineage      which sessions a reader wants, and sessions and turns with their prompts
 search, summaries, session_records    sessions by their contents, in short for lists, whole for exports
 history                               stored conversations that a call is compared with
 retention                             deletions
 archived_rows, copying                sessions to files and back, a whole database into another one
 keys, usage                           API keys and the tokens that they used
 leases, trainer_status                which process drives reloads, and what trainers do
 changes, engine_activity              what is new for those who listen to events, and how busy the engines are
"""
