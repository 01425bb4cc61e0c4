"""Speed, always as a ratio to a ceiling or a peer measured in the same run, and only after the bits were checked.

Each file is a bench with a `run`; `check` compares bits first. Take it by name: `from narrowcast.bench import codecs`.
"""
