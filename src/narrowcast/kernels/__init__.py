"""How codes are computed: `ops` says what each op promises, `reference` is the oracle, `native` is fast."""
