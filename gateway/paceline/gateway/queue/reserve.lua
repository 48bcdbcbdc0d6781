-- id, owner, token of this call, timeout_ms, max_requests, lease_ms
local id, owner, token = ARGV[2], ARGV[3], ARGV[4]
local timeout_ms, max_requests, lease_ms = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
drop_reservations()
local request = load(id)
if request then
  -- The same call, sent again because its reply was lost.
  return {request.token == token and 'ok' or 'exists'}
end
if held() >= max_requests then
  return full('requests')
end
redis.call('HSET', key('req', id), 'state', 'reserved', 'owner', owner, 'token', token)
redis.call('ZADD', RESERVED, now + timeout_ms, id)
redis.call('ZREM', ENDED, id)
keep(key('req', id), timeout_ms)
keep(RESERVED, timeout_ms)
touch_owner(owner, lease_ms)
return {'ok'}
