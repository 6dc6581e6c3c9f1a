"""Write and read run folders, and display them.

Nothing here knows what produced a run: strategies, hubs, members or processes.

Doors: dashboard.serve, data, environment, folder, loaded, looking, metrics.log, reports.comparison,
reports.comparison_table, reports.listing, reports.live.plain, reports.live.view,
reports.live.watch, reports.message, reports.page.document, reports.page.story, reports.plot,
reports.sweep_rows, reports.tables, reports.trace, reports.units, summary, tracking.trackers.
"""
