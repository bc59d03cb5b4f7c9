"""``report.html``: a run's curves, samples, failures and times in one page, which needs no network."""
