"""A run as one HTML page that opens without a network: `report_of` reads folders, `page` writes."""
