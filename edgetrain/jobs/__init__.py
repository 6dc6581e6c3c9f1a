"""A job on paper: the file, its rules, its names looked up, what it costs and promises.

Nothing is started here; torch is not imported before a task is loaded.

Doors: building, bundles, capacity.estimate, capacity.parcels, capacity.question, choosing, cohorts,
defaults, doubts, fallback, grid, job, lookup, on_card, on_member, optimizers, pipeline,
placement.bars, placement.beside, placement.decision, placement.formulas, placement.machines,
placement.question, placement.replanning, placement.search, placement.words, plan,
privacy.accounting, privacy.promise, reading, resolved, rules, schema, shares, topology.
"""
