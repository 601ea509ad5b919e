"""A page about runs: what ranks did over time, drawn from the JSON files of `parverify run`."""
