"""Rules about failures that are no deaths. Others gather the facts and act on the verdicts."""
