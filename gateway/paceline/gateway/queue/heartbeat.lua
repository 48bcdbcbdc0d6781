-- owner, lease_ms
touch_owner(ARGV[2], tonumber(ARGV[3]))
return 'ok'
