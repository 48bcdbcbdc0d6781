-- lease_ms, most lapses of one request
local lease_ms, max_lapses = tonumber(ARGV[2]), tonumber(ARGV[3])
local reaped = drop_expired(lease_ms) + drop_reservations()

local all = redis.call('HGETALL', LEASES)
for i = 1, #all, 2 do
  local id = all[i]
  if parse_lease(all[i + 1]) <= now then
    local request = load(id)
    redis.call('HDEL', LEASES, id)
    local lapses = tonumber(request.lapses) + 1
    if owner_lives(request.owner) and lapses <= max_lapses then
      -- The owner never saw the grant, or is late; in the second case its next extend takes the lease back.
      request.retry = '1'
      request.deadline = now + tonumber(request.wait_ms)
      redis.call('HSET', key('req', id), 'state', 'queued', 'retry', '1', 'lapses', lapses, 'verifier', '',
        'deadline', request.deadline)
      put_waiting(id, request)
    else
      redis.call('DEL', key('req', id))
      tell_owner(request.owner, 0, '', id, lease_ms)
    end
    reaped = reaped + 1
  end
end

local dead = {}
for _, owner in ipairs(redis.call('ZRANGEBYSCORE', OWNERS, '-inf', now)) do
  dead[owner] = true
end
if next(dead) then
  for _, id in ipairs(redis.call('ZRANGE', WAITING, 0, -1)) do
    local request = load(id)
    if dead[request.owner] then
      drop_waiting(id, request, lease_ms)
      reaped = reaped + 1
    end
  end
  for _, id in ipairs(redis.call('ZRANGE', RESERVED, 0, -1)) do
    if dead[redis.call('HGET', key('req', id), 'owner')] then
      redis.call('ZREM', RESERVED, id)
      redis.call('DEL', key('req', id))
      reaped = reaped + 1
    end
  end
  redis.call('ZREMRANGEBYSCORE', OWNERS, '-inf', now)
end
redis.call('ZREMRANGEBYSCORE', ENDED, '-inf', now)
return reaped
