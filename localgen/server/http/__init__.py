"""HTTP access control: keys, hosts, rate limits, body limits, error responses."""
