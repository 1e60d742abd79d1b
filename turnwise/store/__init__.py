"""The database: the only state that proxy and trainer share.

All code here is synchronous SQLAlchemy Core, the same for SQLite and PostgreSQL; the proxy calls it from threads. Most
functions take an open transaction, and who opened it commits all changes together. A function that is given the id of a
session, turn, version, key or policy raises `NotFound` if it, or the given tenant, has none. The modules:

 schema, rows                          what is stored, and how records become rows and back
 database, postgres, statements        connections and transactions, and SQL that SQLAlchemy does not cover
 selection                             which sessions a reader or a writer wants
 sessions, turns, rewards, feedback    what agents and people write, each once, and how it is read
 media                                 images, each once for its tenant, and which sessions have them
 conversations, forks                  stored conversations that calls extend, and copies of them
 groups, claims                        what is ready to be trained, and what a trainer holds and acknowledges
 experiences                           what is trained and evaluated, computed from turns and rewards
 policies, versions, serving, arms     policies, their versions, which are served, and what their sessions did
 updates                               updates and what each trained
 search, overview                      searches, exports and counts, for people
 consent                               whose sessions are not trained, or not even recorded
 keys, processes                       API keys, and what proxies and trainers tell each other
 retention, archive, copying           deletions, sessions that leave and come back, whole databases
"""
