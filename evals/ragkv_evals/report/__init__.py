"""Reports that people look at: charts and one HTML page out of the folders of runs."""
